"""What a tool declares and knows, who may call it, and what all runs of the process share of its service."""
