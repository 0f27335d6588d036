"""SQLiteStore: journals in one file."""
