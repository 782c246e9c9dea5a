"""Lists, shows, purges and redrives dead letters."""
