FROM python:3.12-slim AS build
RUN python -m venv /opt/popgate
WORKDIR /source
COPY pyproject.toml LICENSE README.md ./
COPY proxy proxy
COPY clients/python clients/python
RUN /opt/popgate/bin/pip install --no-cache-dir '.[server]'

FROM python:3.12-slim
RUN useradd --system --uid 10001 --user-group --no-create-home popgate \
    && install --directory --owner=popgate --group=popgate --mode=0700 /data
COPY --from=build /opt/popgate /opt/popgate
ENV PATH="/opt/popgate/bin:$PATH" PYTHONUNBUFFERED=1
USER popgate
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=2)"]
ENTRYPOINT ["popgate"]
CMD ["serve", "--host", "0.0.0.0", "--data-dir", "/data"]
