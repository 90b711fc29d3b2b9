"""What every other room may use and which uses none of them: names, places, identities, and how things travel."""
