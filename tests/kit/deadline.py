"""How long a test waits for what it was promised."""

from __future__ import annotations

# Only bounds how long a broken promise can hang; what is waited for always comes much sooner.
DEADLINE = 60.0
