"""Building blocks that know nothing of agents: threads and event loops, limits, files, networks, HTTP servers."""
