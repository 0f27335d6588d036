"""RedisStore: journals in Redis or Valkey."""
