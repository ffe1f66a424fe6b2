"""An error as one line, for the last line that a user reads."""


def in_one_line(error: BaseException) -> str:
    details = getattr(error, "errors", None)  # pydantic's own list of what failed
    told = "; ".join(str(item["msg"]) for item in details()) if callable(details) else str(error)
    return " ".join(told.split()) or type(error).__name__
