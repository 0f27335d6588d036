"""A local server that speaks the wires of OpenAI and Anthropic."""
