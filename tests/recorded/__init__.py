"""The journals of 300 seeded runs, recorded: a change of an event, an order, a field or an append changes a line."""
