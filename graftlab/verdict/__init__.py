"""What rows say together: in which order taps ran, and which of them diverged first."""
