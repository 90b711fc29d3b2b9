"""The plan in force: filters, transform and names, as one immutable value."""
