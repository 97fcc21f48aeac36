"""What tests share: live servers, harnesses in this process, references, tiny models, faults on demand."""
