"""SGLang autotuner."""
