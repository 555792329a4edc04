"""The one page of a machine's results: `build` makes it, of report.html, report.css, report.js and uPlot."""
