"""Methods measured on many images: leaderboards, advice, studies and their reports."""
