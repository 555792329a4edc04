"""Charts and tables from results files. Imports neither torch nor trl, and of experiments what declares the files."""
