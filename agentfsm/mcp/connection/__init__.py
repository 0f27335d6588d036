"""One connection to a server: where it lives, who owns it, how it is reached, what bounds it, what goes wrong."""
