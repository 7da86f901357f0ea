"""One output a file: a report takes conclusions (`model.Report`) and an open text file.

Pure: nothing here reads the machine or the recording. Importing this package imports no report.
"""
