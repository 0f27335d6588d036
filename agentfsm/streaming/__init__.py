"""Event streams, callbacks for events, and the log."""
