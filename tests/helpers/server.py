"""A real HTTP server, whose connections may break."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves ``files``; each connection ends after ``cut`` bytes; ``asked`` keeps the ranges that
    were asked for.
    """

    def __init__(self, ranges=True, cut=None, **files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.cut, self.asked = files, ranges, cut, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def home(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content, asked = self.server.files.get(self.path[1:]), self.headers.get("Range")
        self.server.asked.append(asked)
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.cut])

    def log_message(self, *_):
        pass
