"""State of one execution: the leased journal, the budget, the available tools and the required output."""
