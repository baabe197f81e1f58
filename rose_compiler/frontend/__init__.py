"""From the user's source to a captured program."""
