"""The files in a run's folder, as typed values: who writes them and who reads them agree here."""
