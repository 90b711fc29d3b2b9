"""What tests share: nothing here is a test, and nothing here is imported from one."""
