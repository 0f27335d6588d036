"""PostgresStore: journals in PostgreSQL."""
