"""Results as files: tables for programs, and a self-contained HTML page."""
