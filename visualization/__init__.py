"""Charts and tables from results files. Reads files only: imports neither torch nor trl nor experiments."""
