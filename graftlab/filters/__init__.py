"""Filter expressions over tags; plans, watches and registries share them."""
