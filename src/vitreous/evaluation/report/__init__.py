"""Results as files: tables for programs, a page for people that needs nothing but itself."""
