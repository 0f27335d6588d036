"""Trust in servers: a person's consent, stored approvals, tool policies, names and configuration files."""
