"""Transactions: effects of a delivery that happen once, in the application's own database."""
