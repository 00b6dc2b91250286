"""The report."""
def write_report(found, runs, html=None, json_file=None):
    return "x"
