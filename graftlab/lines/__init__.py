"""From a tap that differs to the operation, its arguments and its line of source."""
