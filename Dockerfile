FROM python:3.12-slim AS build
RUN python -m venv /opt/popgate
WORKDIR /source
COPY pyproject.toml LICENSE README.md ./
COPY proxy proxy
COPY clients/python clients/python
COPY clients/spark clients/spark
RUN /opt/popgate/bin/pip install --no-cache-dir '.[journal]'

# The jobs over the journal, and Spark's master and workers: `docker build --target pipeline`.
FROM build AS build-pipeline
RUN /opt/popgate/bin/pip install --no-cache-dir '.[spark]'

FROM python:3.12-slim AS pipeline
RUN apt-get update \
    && apt-get install --yes --no-install-recommends default-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --create-home popgate \
    && install --directory --owner=popgate --group=popgate --mode=0700 /journal /reports
COPY --from=build-pipeline /opt/popgate /opt/popgate
ENV PATH="/opt/popgate/bin:$PATH" PYTHONUNBUFFERED=1
USER popgate
WORKDIR /reports
ENTRYPOINT []
CMD ["popgate-pipeline", "--help"]

FROM python:3.12-slim
RUN useradd --system --uid 10001 --user-group --no-create-home popgate \
    && install --directory --owner=popgate --group=popgate --mode=0700 /data /journal
COPY --from=build /opt/popgate /opt/popgate
ENV PATH="/opt/popgate/bin:$PATH" PYTHONUNBUFFERED=1
USER popgate
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=2)"]
ENTRYPOINT ["popgate"]
CMD ["serve", "--host", "0.0.0.0", "--data-dir", "/data"]
