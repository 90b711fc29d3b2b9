"""What needs a notebook: the magics, and the widgets."""
