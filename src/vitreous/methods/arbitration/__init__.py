"""Many maps made, the most faithful one kept."""
