"""The page that says what fits without installing anything: `make_page` makes docs/fit.html of docs/fit.json."""
