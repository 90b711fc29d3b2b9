"""What people put into model code, and who is given what it shows."""
