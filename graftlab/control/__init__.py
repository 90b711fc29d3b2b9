"""The notebook's side of a session: runs, what ranks send, questions to them, and what is kept on disk."""
