"""What vLLM loads of afdpatch (`vllm.general_plugins`): a module of its own, so that a failure isn't one of loading.

vLLM logs a plug-in that can't be loaded and goes on without it; what the plug-in's function raises ends vLLM. A server
that was meant to have a role must not come up as a plain one, whatever is wrong with afdpatch.
"""


def register() -> None:
    """Arm afdpatch in a process that starts vLLM.

    Raises:
        ImportError: `import afdpatch` finds something else, such as the folder above a clone's package, or fails.
            A script that ends Python is such a thing.
        PatchError: see `afdpatch.register`.
    """
    try:
        import afdpatch
    except SystemExit as error:  # else vLLM would end without a word, perhaps with exit code 0
        raise ImportError("afdpatch: what is imported by that name ends Python; see above where it stands") from error
    if not hasattr(afdpatch, "register"):
        found = getattr(afdpatch, "__file__", None) or ", ".join(afdpatch.__path__)
        raise ImportError(
            f"afdpatch: expected the installed package, found {found}, which stands before it on sys.path; start "
            f"Python (or keep the script) in another folder, or rename that one"
        )
    afdpatch.register()
