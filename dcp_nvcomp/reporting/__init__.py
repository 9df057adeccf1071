"""What a save or load came to, as a page for a browser.

write_report(stats, path)      report.py: reads statistics, and writes the page
    page.py                    the page as HTML; style.py its looks
    findings.py                which rank was slow, and at what
"""
