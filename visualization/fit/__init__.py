"""The page that says what fits without installing anything: `build` makes docs/fit.html of docs/fit.json."""
