"""The execution of one run: its plan, its refusal or its launch, its proof, and its record."""
