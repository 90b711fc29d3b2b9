"""The widgets: editors and a dashboard over a live session."""
