"""What commands print, and how it fits a terminal."""
