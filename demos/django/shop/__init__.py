"""A shop that cancels unpaid orders."""
