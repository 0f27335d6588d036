"""Who watches: the events of a stream, how they are handed over, the log."""
