"""What is believed of servers, who is asked, where that is kept, and where servers come from."""
