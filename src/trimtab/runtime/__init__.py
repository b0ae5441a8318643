"""MUTATE: applies a Plan to live objects, reversibly."""
