// Package pki makes certificate authorities and certificates for tests.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"time"
)

// Authority is a certificate authority.
type Authority struct {
	Pair
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// Pair is a certificate and its key, in PEM.
type Pair struct {
	Certificate, Key string
}

// New makes a certificate authority that is valid for ten years from an hour ago.
func New(name string) (*Authority, error) {
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(10, 0, 0),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	return sign(template, &Authority{certificate: template})
}

// Issue signs a certificate with a new key. Where the template has no NotAfter, it is valid for a day.
func (a *Authority) Issue(template x509.Certificate) (Pair, error) {
	if template.NotAfter.IsZero() {
		template.NotBefore, template.NotAfter = a.certificate.NotBefore, time.Now().AddDate(0, 0, 1)
	}
	signed, err := sign(&template, a)
	if err != nil {
		return Pair{}, err
	}
	return signed.Pair, nil
}

// sign signs with a new key. An authority that has no key yet signs its own.
func sign(template *x509.Certificate, by *Authority) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	signer := by.key
	if signer == nil {
		signer = key
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.certificate, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	a := &Authority{key: key, Pair: Pair{
		Certificate: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		Key:         string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})),
	}}
	a.certificate, err = x509.ParseCertificate(der)
	return a, err
}
