from . import app

if __name__ == "__main__":  # not in the processes that vLLM starts
    app()
