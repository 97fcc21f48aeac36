"""What bulk jobs read and write: one reader and one writer for each format."""
