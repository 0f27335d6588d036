"""OpenAI's chat completions and responses APIs, and servers that are compatible with them."""
