"""The ``%graft`` magics: they parse, and call the session."""
