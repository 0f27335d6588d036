"""What a call has to bring: a schema from hints or given, and arguments read, refused or mended."""
